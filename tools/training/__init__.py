"""Training of the example drafter: text by the target itself, block training, acceptance. See ``tools/train_drafter.py``."""
