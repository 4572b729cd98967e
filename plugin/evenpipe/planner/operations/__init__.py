"""Operations: what each part of a model computes, moves and keeps on one GPU."""
