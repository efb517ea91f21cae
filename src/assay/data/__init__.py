"""Real data by name: text, images and series, from what is installed, your own files, or their usual home.

A name is looked for in what a dependency ships, then under ``$ASSAY_DATA`` (which is only ever read), then in the cache
(``~/.cache/assay``), and is at last downloaded into the cache. `available` lists the names.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "catalog": ["DataSet", "available"],
        "images": ["Images", "load_images"],
        "letters": ["Letters", "load_letters"],
        "needs": ["needs"],
        "places": ["DataUnavailable", "cache_home", "find"],
        "preferences": ["PreferencePair", "Preferences", "load_preferences"],
        "reviews": ["Reviews", "load_reviews"],
        "series": ["Series", "load_series"],
        "text": ["load_text"],
    },
)
