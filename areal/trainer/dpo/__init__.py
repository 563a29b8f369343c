"""The learner of direct preference optimisation."""
