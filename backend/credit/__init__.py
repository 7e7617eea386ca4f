"""How verified work becomes credit."""
