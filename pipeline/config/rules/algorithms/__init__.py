"""Rules of the learning algorithm."""
