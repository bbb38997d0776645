"""Networks tuned to image datasets."""
