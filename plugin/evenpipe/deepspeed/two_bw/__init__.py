"""2BW in DeepSpeed's engine: no flushes between `train_batch` calls, two weight versions, steps finished later."""
