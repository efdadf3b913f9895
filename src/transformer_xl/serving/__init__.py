"""A model behind HTTP: an API like OpenAI's, sessions with memory, and what the page needs. Extra `serve`."""
