"""Records, seams, errors, events, blobs: what every stage shares. Imports nothing else of ours, and no torch."""
