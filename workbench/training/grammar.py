"""The grammar of the miniature's conversations: closed word lists, functions, and one rule for each kind.

A rule draws from a `random.Random` and gives a `Conversation`: what is asked, what the assistant thinks and what it
must do. Kinds:

    answer     a question that needs no function, with or without functions at hand
    call       a request that one of the functions fits; arguments are copied from it
    result     the same request, the call and what the function returned: the assistant tells it
    follow_up  a second request that changes one argument of the first: the others come from the conversation
    refuse     a request that none of the functions at hand fits
    recall     facts, a long text, and a question for one of the facts
    drill      many facts and a question for each of several
    requests   several requests to one hand of functions, some of which fit

The last two are for training alone, where one question in a conversation teaches too slowly to look a fact up, and to
look whether the function is there.

A `combination` is the values that meet in a request or a fact. A tenth of all combinations, chosen by a digest, is held
out: `sample` gives conversations that ask for one of those, or conversations in which none of them occurs, so that what
a test asks was never seen in training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

HELDOUT_PERCENT = 10

NAMES = (
    "Anna", "Bela", "Clara", "David", "Edith", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karin", "Lena", "Martin",
    "Nora", "Oscar", "Paula", "Quentin", "Rosa", "Simon", "Tilda", "Ursula", "Victor", "Wanda", "Xaver", "Yvonne",
    "Zoe", "Peter", "Maria", "Thomas", "Helen",
)  # fmt: skip
CITIES = (
    "Oslo", "Bergen", "Paris", "Lyon", "Rome", "Milan", "Madrid", "Seville", "Lisbon", "Porto", "Berlin", "Hamburg",
    "Vienna", "Graz", "Prague", "Brno", "Warsaw", "Krakow", "Athens", "Dublin", "Cork", "London", "Leeds", "York",
    "Zurich", "Basel", "Tokyo", "Kyoto", "Cairo", "Boston", "Chicago", "Denver",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
CURRENCIES = ("euros", "dollars", "pounds", "francs", "crowns", "yen", "pesos", "rupees")
RESTAURANTS = (
    "Golden Lion", "Blue Door", "Old Mill", "Red Fox", "Green Garden", "White Swan", "Black Horse", "Silver Moon",
    "Three Bells", "Little Kitchen", "Harbour House", "Olive Tree",
)  # fmt: skip
ARTISTS = (
    "Bach", "Mozart", "Chopin", "Verdi", "Haydn", "Handel", "Brahms", "Schubert", "Vivaldi", "Purcell", "Liszt",
    "Dvorak", "Grieg", "Mahler",
)  # fmt: skip
ROOMS = ("kitchen", "bedroom", "hall", "garden", "study", "cellar", "attic", "library", "garage", "bathroom")
COLORS = ("red", "blue", "green", "yellow", "white", "orange", "purple", "pink")
LABELS = (
    "wake up", "take the bread out", "call home", "feed the cat", "catch the bus", "water the plants", "walk the dog",
    "take the medicine", "start the meeting", "leave for school", "stop the oven", "close the shop",
)  # fmt: skip
TEXTS = (
    "I will be late", "dinner is ready", "the key is under the mat", "see you at noon", "the train is on time",
    "happy birthday", "please call me back", "the meeting is over", "I have found your book", "bring some milk",
    "the door is open", "we are at the station", "the letter has come", "thank you for the flowers",
)  # fmt: skip
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")
ITEMS = (
    "lantern", "drum", "ladder", "basket", "mirror", "violin", "helmet", "carpet", "clock", "kettle", "saddle",
    "compass", "hammer", "pillow", "trumpet", "candle", "barrel", "anchor", "ribbon", "bottle",
)  # fmt: skip
PLACES = (
    "cellar", "garden", "tower", "stable", "chapel", "kitchen", "attic", "barn", "mill", "forest", "castle", "market",
    "library", "garage", "harbour", "bakery",
)  # fmt: skip
CAPITALS = {
    "Norway": "Oslo", "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Germany": "Berlin",
    "Austria": "Vienna", "Poland": "Warsaw", "Greece": "Athens", "Ireland": "Dublin", "England": "London",
    "Japan": "Tokyo", "Egypt": "Cairo", "Hungary": "Budapest", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Belgium": "Brussels", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago",
    "Kenya": "Nairobi", "India": "New Delhi", "China": "Beijing",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "high": "low", "big": "small", "fast": "slow", "old": "new", "dark": "light", "hard": "soft",
    "wet": "dry", "full": "empty", "rich": "poor", "loud": "quiet", "long": "short", "strong": "weak", "open": "closed",
    "early": "late", "heavy": "light", "sweet": "bitter", "true": "false", "wide": "narrow", "thick": "thin",
}  # fmt: skip

#: Wishes that no function of this grammar fits: how they are asked for, and what they are called in the reply.
NEVER_POSSIBLE = (
    ("order a pizza with mushrooms", "order food"),
    ("call a taxi to the station", "call a taxi"),
    ("water the roses", "water plants"),
    ("repair my bicycle", "repair things"),
    ("paint the fence", "paint things"),
    ("cut my hair", "cut hair"),
    ("buy two tickets for the opera", "buy tickets"),
    ("take a picture of the moon", "take pictures"),
    ("sweep the floor", "clean rooms"),
    ("bake a cake", "bake cakes"),
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation and the turn that ends it.

    `messages` lead up to the assistant's last turn, which has either `answer` or `call` = (name, arguments), with
    `reasoning` before it where `thinking` is on. `combination` is what that turn needs, `others` what else occurs.
    `decision` says in words what a call or a refusal decides.
    """

    kind: str
    combination: str
    others: tuple[str, ...]
    thinking: bool
    tools: tuple[dict, ...]
    messages: tuple[dict, ...]
    reasoning: str
    answer: str | None = None
    call: tuple[str, dict] | None = None
    decision: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the grammar: its schema, its values, and the sentences in which it is asked for.

    `phrases` have a place `{name}` for every parameter; `wish` is what the reply calls it when it is not at hand.
    `returns` draws what the function gives back and the sentence that tells it. `follow_up` maps a parameter to
    sentences that change it alone.
    """

    name: str
    description: str
    values: dict[str, Callable[[Random], str | int]]
    phrases: tuple[str, ...]
    wish: str
    returns: Callable[[Random, dict], tuple[dict, str]]
    follow_up: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def schema(self) -> dict:
        sample = {name: draw(Random(0)) for name, draw in self.values.items()}
        kinds = {name: "integer" if isinstance(value, int) else "string" for name, value in sample.items()}
        parameters = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in kinds.items()},
            "required": list(kinds),
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def arguments(self, random: Random) -> dict[str, str | int]:
        """Values for every parameter; two of the same list never meet (no journey from Rome to Rome)."""
        while True:
            drawn = {name: draw(random) for name, draw in self.values.items()}
            if len(set(drawn.values())) == len(drawn):
                return drawn


def _one_of(values: Sequence[str]) -> Callable[[Random], str]:
    return lambda random: random.choice(values)


def _number(low: int, high: int) -> Callable[[Random], int]:
    return lambda random: random.randint(low, high)


def _time(random: Random) -> str:
    return f"{random.randint(1, 23)}:{random.choice(('00', '15', '30', '45'))}"


def _weather(random: Random, at: dict) -> tuple[dict, str]:
    sky, degrees = random.choice(SKIES), random.randint(1, 35)
    told = f"It will be {sky} in {at['city']} on {at['day']}, with {degrees} degrees."
    return {"sky": sky, "degrees": degrees}, told


def _alarm(random: Random, at: dict) -> tuple[dict, str]:
    if random.random() < 0.3:
        return {"status": "failed"}, f"The alarm for {at['time']} could not be set."
    return {"status": "set"}, f"The alarm for {at['time']} is set: {at['label']}."


def _message(random: Random, at: dict) -> tuple[dict, str]:
    if random.random() < 0.3:
        return {"status": "failed"}, f"The message to {at['to']} could not be sent."
    return {"status": "sent"}, f"The message to {at['to']} was sent."


def _conversion(random: Random, at: dict) -> tuple[dict, str]:
    result = random.randint(10, 9999)
    return {"result": result}, f"{at['amount']} {at['source']} are {result} {at['target']}."


def _table(random: Random, at: dict) -> tuple[dict, str]:
    if random.random() < 0.3:
        return {"status": "full"}, f"The {at['restaurant']} has no table at {at['time']}."
    return {"status": "booked"}, f"Your table for {at['guests']} at the {at['restaurant']} is booked for {at['time']}."


def _music(random: Random, at: dict) -> tuple[dict, str]:
    if random.random() < 0.3:
        return {"status": "no speaker"}, f"There is no speaker in the {at['room']}."
    return {"status": "playing"}, f"{at['artist']} is playing in the {at['room']}."


def _lamp(random: Random, at: dict) -> tuple[dict, str]:
    if random.random() < 0.3:
        return {"status": "no lamp"}, f"There is no lamp in the {at['room']}."
    return {"status": "on"}, f"The lamp in the {at['room']} is {at['color']} at {at['percent']} percent."


def _train(random: Random, at: dict) -> tuple[dict, str]:
    leaves, platform = _time(random), random.randint(1, 20)
    told = f"The train to {at['destination']} leaves {at['origin']} at {leaves} from platform {platform}."
    return {"leaves": leaves, "platform": platform}, told


FUNCTIONS = (
    Function(
        name="get_weather",
        description="Weather forecast for a city",
        values={"city": _one_of(CITIES), "day": _one_of(DAYS)},
        phrases=(
            "What will the weather be in {city} on {day}?", "How is the weather in {city} on {day}?",
            "Tell me the weather on {day} in {city}.", "Will it rain in {city} on {day}?",
            "On {day} I go to {city}. What weather can I expect?", "Do I need a coat in {city} on {day}?",
        ),
        wish="look up the weather",
        returns=_weather,
        follow_up={
            "city": ("And in {city}?", "What about {city}?", "The same for {city}, please."),
            "day": ("And on {day}?", "What about {day}?", "The same for {day}, please."),
        },
    ),
    Function(
        name="set_alarm",
        description="Set an alarm with a label",
        values={"time": _time, "label": _one_of(LABELS)},
        phrases=(
            "Set an alarm for {time} to {label}.", "Wake me with an alarm at {time}, it is time to {label} then.",
            "At {time} I must {label}. Set an alarm.", "I need an alarm at {time}: {label}.",
            "Remind me at {time} to {label}.",
        ),
        wish="set an alarm",
        returns=_alarm,
        follow_up={"time": ("Make another one for {time}.", "The same at {time}, please.")},
    ),
    Function(
        name="send_message",
        description="Send a text message to a person",
        values={"to": _one_of(NAMES), "text": _one_of(TEXTS)},
        phrases=(
            "Tell {to} that {text}.", "Send {to} a message: {text}.", "Write to {to}: {text}.",
            "Please let {to} know: {text}.", "Send the message '{text}' to {to}.",
        ),
        wish="send a message",
        returns=_message,
        follow_up={"to": ("Send the same to {to}.", "Tell {to} too.")},
    ),
    Function(
        name="convert_currency",
        description="Convert an amount of money",
        values={"amount": _number(2, 999), "source": _one_of(CURRENCIES), "target": _one_of(CURRENCIES)},
        phrases=(
            "How many {target} are {amount} {source}?", "Convert {amount} {source} to {target}.",
            "What are {amount} {source} in {target}?", "I have {amount} {source}. How much is that in {target}?",
        ),
        wish="convert money",
        returns=_conversion,
        follow_up={
            "amount": ("And {amount}?", "What about {amount}?"),
            "target": ("And in {target}?", "How much is it in {target}?"),
        },
    ),
    Function(
        name="book_table",
        description="Book a table in a restaurant",
        values={"restaurant": _one_of(RESTAURANTS), "guests": _number(1, 12), "time": _time},
        phrases=(
            "Book a table at the {restaurant} for {guests} at {time}.",
            "I want to eat at the {restaurant} at {time}, we are {guests}.",
            "Reserve a table for {guests} at {time} in the {restaurant}.",
            "We are {guests} and want to dine at the {restaurant} at {time}.",
        ),
        wish="book a table",
        returns=_table,
        follow_up={"time": ("Try {time} instead.", "What about {time}?")},
    ),
    Function(
        name="play_music",
        description="Play music in a room",
        values={"artist": _one_of(ARTISTS), "room": _one_of(ROOMS)},
        phrases=(
            "Play {artist} in the {room}.", "I want to hear {artist} in the {room}.",
            "In the {room}, play some {artist}.", "Put on {artist} in the {room}, please.",
        ),
        wish="play music",
        returns=_music,
        follow_up={"room": ("In the {room} too.", "And in the {room}."), "artist": ("Now {artist}.", "Then {artist}.")},
    ),
    Function(
        name="set_lamp",
        description="Set color and brightness of a lamp",
        values={"room": _one_of(ROOMS), "color": _one_of(COLORS), "percent": _number(5, 100)},
        phrases=(
            "Make the lamp in the {room} {color} at {percent} percent.",
            "Set the {room} light to {color}, {percent} percent.",
            "I want {color} light in the {room} with {percent} percent.",
            "Turn the {room} lamp to {percent} percent {color}.",
        ),
        wish="set a lamp",
        returns=_lamp,
        follow_up={
            "color": ("Now {color}.", "Make it {color}."),
            "room": ("The same in the {room}.", "And in the {room}."),
        },
    ),
    Function(
        name="find_train",
        description="Find a train connection",
        values={"origin": _one_of(CITIES), "destination": _one_of(CITIES), "day": _one_of(DAYS)},
        phrases=(
            "Find a train from {origin} to {destination} on {day}.",
            "When does a train go from {origin} to {destination} on {day}?",
            "I must travel on {day} from {origin} to {destination}. Which train goes?",
            "Is there a train to {destination} from {origin} on {day}?",
        ),
        wish="find a train",
        returns=_train,
        follow_up={
            "day": ("And on {day}?", "What about {day}?"),
            "destination": ("And to {destination}?", "What about going to {destination}?"),
        },
    ),
)  # fmt: skip


def _hand(random: Random, needed: Function | None, without: Function | None = None) -> tuple[dict, ...]:
    """One to four functions in random order, with `needed` and without `without` among them."""
    others = [f for f in FUNCTIONS if f is not needed and f is not without]
    chosen = random.sample(others, random.randint(0 if needed else 1, 3))
    chosen += [needed] if needed else []
    random.shuffle(chosen)
    return tuple(function.schema() for function in chosen)


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def _called(name: str, arguments: dict) -> dict:
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _returned(result: dict) -> dict:
    return {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(result)}


def _values(arguments: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in arguments.items())


def _key(*parts: object) -> str:
    return "|".join(str(part) for part in parts)


def _wanted(wish: str) -> str:
    return f"The user wants me to {wish}."


def _decided(name: str, arguments: dict) -> str:
    return f"I call {name} with {_values(arguments)}."


DECIDED_AGAINST = "None of my functions does that."


def answer(random: Random, thinking: bool) -> Conversation:
    question, reasoning, reply, (combination, *others) = random.choice(QUESTIONS)(random)
    tools = _hand(random, None) if random.random() < 0.3 else ()
    messages = question if isinstance(question, tuple) else (_user(question),)
    reasoning = f"No function is needed. {reasoning}" if tools else reasoning
    return Conversation("answer", combination, tuple(others), thinking, tools, messages, reasoning, answer=reply)


def call(random: Random, thinking: bool) -> Conversation:
    function = random.choice(FUNCTIONS)
    arguments = function.arguments(random)
    messages = (_user(random.choice(function.phrases).format(**arguments)),)
    return Conversation(
        "call", _key("call", function.name, *arguments.values()), (), thinking, _hand(random, function), messages,
        _wanted(function.wish), call=(function.name, arguments), decision=_decided(function.name, arguments),
    )  # fmt: skip


def result(random: Random, thinking: bool) -> Conversation:
    function = random.choice(FUNCTIONS)
    arguments = function.arguments(random)
    returned, told = function.returns(random, arguments)
    messages = (
        _user(random.choice(function.phrases).format(**arguments)),
        _called(function.name, arguments),
        _returned(returned),
    )
    return Conversation(
        "result", _key("call", function.name, *arguments.values()), (), thinking, _hand(random, function), messages,
        f"{function.name} gave {_values(returned)}. I tell the user.", answer=told,
    )  # fmt: skip


def follow_up(random: Random, thinking: bool) -> Conversation:
    function = random.choice(FUNCTIONS)
    first = function.arguments(random)
    returned, told = function.returns(random, first)
    changed = random.choice(list(function.follow_up))
    second = dict(first)
    while len(set(second.values())) < len(second) or second == first:
        second[changed] = function.values[changed](random)
    messages = (
        _user(random.choice(function.phrases).format(**first)),
        _called(function.name, first),
        _returned(returned),
        {"role": "assistant", "content": told},
        _user(random.choice(function.follow_up[changed]).format(**second)),
    )
    return Conversation(
        "follow_up", _key("call", function.name, *second.values()), (_key("call", function.name, *first.values()),),
        thinking, _hand(random, function), messages,
        f"The user wants the same with {changed} {second[changed]}. I call {function.name} with {_values(second)}.",
        call=(function.name, second),
    )  # fmt: skip


def refuse(random: Random, thinking: bool) -> Conversation:
    if random.random() < 0.3:
        asked, wish = random.choice(NEVER_POSSIBLE)
        opening = random.choice(("Please {}.", "Could you {}?", "I want you to {}.", "Can you {} today?"))
        request, tools = opening.format(asked), _hand(random, None)
        combination = _key("refuse", wish, opening, *(tool["function"]["name"] for tool in tools))
    else:
        function = random.choice(FUNCTIONS)
        arguments = function.arguments(random)
        request, wish = random.choice(function.phrases).format(**arguments), function.wish
        tools = _hand(random, None, without=function)
        combination = _key("call", function.name, *arguments.values())
    return Conversation(
        "refuse", combination, (), thinking, tools, (_user(request),),
        _wanted(wish),
        answer=f"I have no function to {wish}.", decision=DECIDED_AGAINST,
    )  # fmt: skip


# What needs no function: each gives question, reasoning, reply and combinations, the one asked for first.
Question = tuple[str | tuple[dict, ...], str, str, tuple[str, ...]]


def _capital(random: Random) -> Question:
    country = random.choice(list(CAPITALS))
    phrase = random.choice((
        "What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.",
        "Tell me the capital of {}.", "I forgot the capital of {}. What is it?",
    ))  # fmt: skip
    reply = f"The capital of {country} is {CAPITALS[country]}."
    reasoning = f"The user asks for the capital of {country}."
    return phrase.format(country), reasoning, reply, (_key("capital", country, phrase),)


def _opposite(random: Random) -> Question:
    word = random.choice(list(OPPOSITES))
    phrase = random.choice((
        "What is the opposite of {}?", "Name the opposite of {}.", "Which word is the opposite of {}?",
    ))  # fmt: skip
    reply = f"The opposite of {word} is {OPPOSITES[word]}."
    return phrase.format(word), f"The user asks for the opposite of {word}.", reply, (_key("opposite", word, phrase),)


def _following(random: Random) -> Question:
    cycle, thing = random.choice(((DAYS, "day"), (MONTHS, "month")))
    place = random.randrange(len(cycle))
    step, word = random.choice(((1, "after"), (-1, "before")))
    phrase = random.choice(("Which {} comes {} {}?", "What {} is {} {}?", "Name the {} {} {}."))
    reply = f"{cycle[(place + step) % len(cycle)]} is the {thing} {word} {cycle[place]}."
    question = phrase.format(thing, word, cycle[place])
    return question, f"The user asks for the {thing} {word} {cycle[place]}.", reply, (_key("following", question),)


def _larger(random: Random) -> Question:
    one, two = random.sample(range(10, 100), 2)
    word, chosen = random.choice((("larger", max(one, two)), ("smaller", min(one, two))))
    phrase = random.choice(("Which number is {}, {} or {}?", "Which is {}, {} or {}?"))
    reasoning = f"The user wants the {word} one of {one} and {two}."
    return phrase.format(word, one, two), reasoning, f"{chosen} is {word}.", (_key("larger", word, one, two),)


def _holder(random: Random) -> Question:
    facts = _possessions(random, random.randint(2, 4))
    asked = random.choice(facts)
    *first, last = (f"{person} has the {item}" for person, item in facts)
    told = f"{', '.join(first)} and {last}."
    question, reasoning, reply = _asked_possession(*asked)
    keys = tuple(_key("holder", *fact) for fact in (asked, *(fact for fact in facts if fact is not asked)))
    return f"{told} {question}", reasoning, reply, keys


def _introduced(random: Random) -> Question:
    name, city = random.choice(NAMES), random.choice(CITIES)
    hello = random.choice((
        "Hello, I am {} from {}.", "My name is {} and I live in {}.", "Good morning, {} from {} here.",
    ))  # fmt: skip
    messages = (_user(hello.format(name, city)), {"role": "assistant", "content": f"Hello {name}, how can I help you?"})
    if random.random() < 0.5:
        question, reply, about = "What is my name?", f"Your name is {name}.", "the name"
    else:
        question, reply, about = "Where do I live?", f"You live in {city}.", "the city"
    return (*messages, _user(question)), f"The user told me {about} before.", reply, (_key("introduced", name, city),)


#: Who has what stands twice: nothing in it can be known by heart.
QUESTIONS = (_capital, _opposite, _following, _larger, _holder, _holder, _introduced)


# Facts: who has what, and where whose thing is. No person, thing or place is in two of them.


def _possessions(random: Random, count: int) -> list[tuple[str, str]]:
    return list(zip(random.sample(NAMES, count), random.sample(ITEMS, count), strict=True))


def _asked_possession(person: str, item: str) -> tuple[str, str, str]:
    question, reply = f"What does {person} have?", f"{person} has the {item}."
    return question, f"The user asks what {person} has.", reply


def _places(random: Random, count: int) -> list[tuple[str, str, str]]:
    return list(zip(*(random.sample(words, count) for words in (ITEMS, NAMES, PLACES)), strict=True))


def _told_place(item: str, owner: str, place: str) -> str:
    return f"The {item} of {owner} is in the {place}."


def _asked_place(random: Random, item: str, owner: str, place: str) -> tuple[str, str, str]:
    question = random.choice((f"Where is the {item} of {owner}?", f"Tell me where the {item} of {owner} is."))
    return question, f"The user told me where the {item} of {owner} is.", _told_place(item, owner, place)


def _opening(random: Random) -> str:
    return random.choice(("Remember this.", "Keep this in mind.", "Note this."))


def recall(random: Random, thinking: bool, filler: str) -> Conversation:
    """One to four facts, `filler`, and the question for one of the facts."""
    facts = _places(random, random.randint(1, 4))
    asked = random.choice(facts)
    told = " ".join(_told_place(*fact) for fact in facts)
    question, reasoning, reply = _asked_place(random, *asked)
    between = f"\n\n{filler}\n\n" if filler else " "
    others = tuple(_key("recall", *fact) for fact in facts if fact is not asked)
    messages = (_user(f"{_opening(random)} {told}{between}{question}"),)
    return Conversation(
        "recall", _key("recall", *asked), others, thinking, (), messages, reasoning, answer=reply
    )  # fmt: skip


def drill(random: Random, thinking: bool, filler: str) -> Conversation:
    """Four to ten facts of both sorts, `filler`, and three to eight questions, each answered before the next."""
    places, possessions = _places(random, random.randint(2, 6)), _possessions(random, random.randint(2, 4))
    told = [_told_place(*fact) for fact in places] + [f"{person} has the {item}." for person, item in possessions]
    turns = [(_key("recall", *fact), *_asked_place(random, *fact)) for fact in places]
    turns += [(_key("holder", *fact), *_asked_possession(*fact)) for fact in possessions]
    random.shuffle(told)
    random.shuffle(turns)
    between = f"\n\n{filler}\n\n" if filler else " "
    before = f"{_opening(random)} {' '.join(told)}{between}"
    messages: list[dict] = []
    asked = turns[: random.randint(3, min(8, len(turns)))]
    for _, question, _, reply in asked:
        messages += [_user(before + question), {"role": "assistant", "content": reply}]
        before = ""
    key, _, reasoning, reply = asked[-1]
    others = tuple(other for other, *_ in turns if other != key)
    return Conversation("drill", key, others, thinking, (), tuple(messages[:-1]), reasoning, answer=reply)


def requests(random: Random, thinking: bool) -> Conversation:
    """Three to six requests, half of them for functions that are at hand: those are called, the others refused."""
    functions = list(FUNCTIONS)
    random.shuffle(functions)
    held = random.randint(1, 4)
    at_hand, absent = functions[:held], functions[held:]
    messages: list[dict] = []
    keys: list[str] = []
    last = random.randint(3, 6) - 1
    for number in range(last + 1):
        function = random.choice(random.choice((at_hand, absent)))
        arguments = function.arguments(random)
        keys.append(_key("call", function.name, *arguments.values()))
        messages.append(_user(random.choice(function.phrases).format(**arguments)))
        if number == last:
            break
        if function in at_hand:
            returned, told = function.returns(random, arguments)
            messages += [_called(function.name, arguments), _returned(returned)]
            messages.append({"role": "assistant", "content": told})
        else:
            messages.append({"role": "assistant", "content": f"I have no function to {function.wish}."})
    tools = tuple(held_function.schema() for held_function in at_hand)
    fits = function in at_hand
    return Conversation(
        "requests", keys[-1], tuple(keys[:-1]), thinking, tools, tuple(messages), _wanted(function.wish),
        answer=None if fits else f"I have no function to {function.wish}.",
        call=(function.name, arguments) if fits else None,
        decision=_decided(function.name, arguments) if fits else DECIDED_AGAINST,
    )  # fmt: skip


RULES = {
    "answer": answer, "call": call, "result": result, "follow_up": follow_up, "refuse": refuse, "requests": requests
}  # fmt: skip
RULES_WITH_FILLER = {"recall": recall, "drill": drill}


def is_held_out(combination: str) -> bool:
    """A tenth of all combinations, by a digest of the values alone: the same on any machine and for any seed."""
    digest = hashlib.sha256(combination.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELDOUT_PERCENT


def can_be_measured(combination: str) -> bool:
    """Whether values meet in it. In a wish that nothing fits only the functions at hand are new: no test asks."""
    return not combination.startswith("refuse|")


def sample(
    kind: str, random: Random, *, held_out: bool, thinking: bool | None = None, filler: str = ""
) -> Conversation:
    """A conversation of one kind that asks for a held-out combination, or one in which none occurs.

    `filler` is the text between facts and question of `recall` and `drill`.
    """
    while True:
        thinks = random.random() < 0.5 if thinking is None else thinking
        if kind in RULES_WITH_FILLER:
            drawn = RULES_WITH_FILLER[kind](random, thinks, filler)
        else:
            drawn = RULES[kind](random, thinks)
        if held_out and is_held_out(drawn.combination) and can_be_measured(drawn.combination):
            return drawn
        if not held_out and not any(map(is_held_out, (drawn.combination, *drawn.others))):
            return drawn
