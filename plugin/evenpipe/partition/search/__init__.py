"""What goes beyond DawnPiper: the exact search, stages that share memory, messages on links, and the plan."""
