"""The language-model learner of supervised fine-tuning."""
