"""From files of rows to what a model is trained on or completes."""
