"""Where to cut a profiled model into stages, and what each stage recomputes and swaps (DawnPiper §4, Appendix B)."""
