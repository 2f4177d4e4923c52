"""What comes of a score: sampled, guided and judged texts, and policies trained by rewards."""
