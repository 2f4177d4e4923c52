"""Encoders (BERT, DeBERTa-v2 and v3): embeddings of texts for rankings, and scores of text pairs."""
