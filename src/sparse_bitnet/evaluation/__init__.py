"""What a trained model is worth on text it has not seen."""
