"""Everything that decides what a scored model sees: tokenizer, chat template, profile, protocol."""
