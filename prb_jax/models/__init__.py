"""Decoder models: configuration, rotary embedding, attention, layers and the reward read-out."""
