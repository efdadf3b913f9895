"""Whether everything computes what it should on this machine and this device: a list of checks, each of which can fail and says what to do. `txl doctor`
prints what they found."""
