"""Language models and sentence encoders tuned to texts, with labels or without."""
