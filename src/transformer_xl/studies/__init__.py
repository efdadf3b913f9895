"""The paper's tables as commands. A study is data: presets and differences, the paper's own numbers beside ours, and the orderings it claims."""
