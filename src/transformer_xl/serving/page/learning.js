// A text given to a session that learns while it reads, a piece at a time, and what each token cost with learning and without. Knows nothing of the page.

import { ask, forget } from "./server.js";

const AT_ONCE = 256;

let open = null;
addEventListener("pagehide", () => open && forget(open));

// Yields {first, logprobs, static_logprobs, adapt} for each piece. It is stopped between two, and the session goes with the last.
export async function* learned(model, tokens, signal) {
  const { id } = await ask("/v1/sessions", { model, adapt: { compare: true } }, signal);
  open = `/v1/sessions/${id}`;
  try {
    for (let first = 0; first < tokens.length && !signal.aborted; first += AT_ONCE) {
      yield { first, ...(await ask(`${open}/feed`, { tokens: tokens.slice(first, first + AT_ONCE), logprobs: true })) };
    }
  } finally {
    forget(open);
    open = null;
  }
}
