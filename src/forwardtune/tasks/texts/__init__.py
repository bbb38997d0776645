"""Language models and sentence encoders tuned to labelled texts."""
