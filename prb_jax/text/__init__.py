"""Everything that decides the input of a scored model: tokenizer, chat template, profile, protocol."""
