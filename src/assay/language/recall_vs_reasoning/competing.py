"""Prompts of the paper's two kinds, on which a generic token competes with the answer."""

from itertools import permutations

from .prompts import AssociationProbe

CITIES = {
    "Spain": ("Madrid", "Barcelona"),
    "France": ("Paris", "Lyon"),
    "Germany": ("Berlin", "Munich"),
    "Italy": ("Rome", "Milan"),
    "Japan": ("Tokyo", "Osaka"),
    "China": ("Beijing", "Shanghai"),
    "India": ("Mumbai",),
    "Egypt": ("Cairo",),
    "Russia": ("Moscow",),
    "Canada": ("Ottawa", "Toronto"),
    "Mexico": ("Guadalajara",),
    "Brazil": ("Rio de Janeiro",),
    "Peru": ("Lima",),
    "Chile": ("Santiago",),
    "Cuba": ("Havana",),
    "Kenya": ("Nairobi",),
    "Iran": ("Tehran",),
    "Iraq": ("Baghdad",),
    "Turkey": ("Ankara", "Istanbul"),
    "Greece": ("Athens",),
    "Poland": ("Warsaw",),
    "Portugal": ("Lisbon",),
    "Sweden": ("Stockholm",),
    "Norway": ("Oslo",),
    "Finland": ("Helsinki",),
    "Denmark": ("Copenhagen",),
    "Austria": ("Vienna",),
    "Belgium": ("Brussels",),
    "Ireland": ("Dublin",),
    "Hungary": ("Budapest",),
    "Australia": ("Sydney",),
    "Thailand": ("Bangkok",),
}
NAMES = ("Mary", "John", "Tom", "Anna", "James", "Sarah", "Paul", "Emma")


def city_prompts() -> AssociationProbe:
    """Forty of the form "Madrid is located in", " Spain" against " the": facts that the weights hold.

    Example:
        >>> len(city_prompts().items), city_prompts().items[0]
        (40, Item(prompt='Madrid is located in', answer=' Spain', distractor=' the'))
    """
    return AssociationProbe(
        (f"{city} is located in", f" {country}", " the") for country, cities in CITIES.items() for city in cities
    )


def name_prompts() -> AssociationProbe:
    """The 56 ordered pairs of eight names, indirect-object identification: the answer is in the context.

    Example:
        >>> len(name_prompts().items), name_prompts().items[0].prompt
        (56, 'When Mary and John went to a store, John gave a drink to')
    """
    return AssociationProbe(
        (f"When {one} and {other} went to a store, {other} gave a drink to", f" {one}", " the")
        for one, other in permutations(NAMES, 2)
    )
