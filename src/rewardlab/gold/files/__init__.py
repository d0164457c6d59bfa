"""What the stages hand to each other."""
