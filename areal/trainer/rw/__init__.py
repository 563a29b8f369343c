"""The learner of reward models."""
