"""Makes exports of trained models, and compares them with the trained model."""
