"""What runs in the child process: files of strangers in, plain facts and tensors out. No torch, and nothing of ours but `errors`; a test holds it."""
