"""Reading and writing of Hugging Face checkpoints: the only package that uses their tensor names."""
