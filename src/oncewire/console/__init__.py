"""The web console: what the parts do, live, in a browser; and the few acts that a person decides there.

    rules      pure: rows, rates and totals out of what was found; what needs a person; text made harmless
    streams    one look at NATS: streams and consumers against what is declared, durability, losses
    topics     the broker's topics, asked for over its own API
    letters    dead letters: an index by headers, a look into one, replay and drop as jobs
    runs       runs and steps, from the lake where there is one, else from the newest messages
    lake       the pipeline's state, read in a thread
    watch      one look per second for all who watch, none for nobody; sections go out over SSE when they changed
    sessions   who has logged in, by cookie
    routes     the endpoints and their rights
    page/      the page: plain modules, nothing from elsewhere

It stands above the parts and reads them by their own functions; it has no rules about their things.
"""

from oncewire.console.run import Sources, serving

__all__ = ["Sources", "serving"]
