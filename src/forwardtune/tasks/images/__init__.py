"""Networks tuned to sets of images."""
