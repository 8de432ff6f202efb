"""Rules for the learning algorithm."""
