"""What scores are used for: sampled, guided and judged texts, and policies trained with rewards."""
