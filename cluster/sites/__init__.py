"""Where processes are put, and what stands for one."""
