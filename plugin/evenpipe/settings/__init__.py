"""What a user asks EvenPipe for: one typed model, the table of contradictions, and how front ends write them."""
