"""Whose turn a request is: the session that its body or its headers name.

The first that is there counts: the body's `session_id`; HEADERS; Claude Code's, of which an agent's
id names the child; Codex' `session-id`; `prompt_cache_key`; `session_id` inside Anthropic's
`metadata.user_id`, never all of that text; the session of `previous_response_id`. A session is its
API key's alone. It steers where a turn goes and what is evicted last; what may be found in a cache
is for the salt alone to say.
"""

from collections.abc import Mapping
from hashlib import blake2b

from router.openai.body import Prepared

HEADERS = ("x-session-id", "x-dynamo-session-id", "x-session-affinity")
CLAUDE, CLAUDE_AGENT, CODEX = "x-claude-code-session-id", "x-claude-code-agent-id", "session-id"


def identify(prepared: Prepared, headers: Mapping[str, str], client: str, unique_id: str) -> None:
    """Tell the choices of a request whose turn it is.

    client: the name of its API key. unique_id: of the request, names a session that begins with it.
    """
    named, owner = prepared.named, _digest(client)
    told = [named.session_id, *(headers.get(name, "") for name in HEADERS)]
    if claude := headers.get(CLAUDE):
        told.append(f"{claude}/{headers.get(CLAUDE_AGENT, '')}")
    told += [headers.get(CODEX, ""), named.cache_key]
    text = next(filter(None, told), "")
    session = f"{owner}/{_digest(text)}" if text else named.previous
    if not session and (named.begins or named.ttl_s is not None):
        session = f"{owner}/{_digest(unique_id)}"
    for req in prepared.reqs:
        req.session, req.keep_s = session, named.ttl_s


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
