"""What one grammar may cost, the same in routers, which refuse what costs more, and in workers."""

from llguidance import LLParserLimits

# A lexer's states take 1 to 2 kB each; a string of 16,384 characters needs some 104,000. A step's
# work is some 0.1 s at most. What is done before the first step, llguidance does not limit.
GRAMMAR_LIMITS = LLParserLimits(
    max_lexer_states=150_000, step_lexer_fuel=150_000, step_max_items=30_000
)
