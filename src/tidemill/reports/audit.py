"""The outside audit."""
