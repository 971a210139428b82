"""The words of the synthetic texts: names, adjectives and nouns for keys and values, and words of the filler.

Adjectives, nouns and jobs begin with a consonant, so that "a" is always the right article. No word of a key
or value occurs in the filler. The demo model's tokenizer has each name, adjective and noun as one token with
a leading space.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    """
    Aaron Abel Ada Adele Agnes Alan Albert Alda Alec Alfred Alice Alma Alvin Amos Amy Andrea Anita Anna Anton
    Arne Arthur Astrid Audrey August Barbara Basil Beatrix Bella Benno Berta Bianca Boris Brenda Bruno Carl
    Carla Carmen Caspar Cecil Celia Chloe Clara Claude Clement Colin Conrad Cora Cyrus Dagmar Daisy Daniel
    Daphne Darius David Delia Dennis Diana Dolores Donald Dora Doris Duncan Edgar Edith Edmund Edna Elena
    Elias Elisa Ella Elmer Elsa Emil Emma Enid Eric Erna Esther Ethan Eugene Eva Fabian Fanny Felix Fergus
    Flora Floyd Frank Freda Frida Gerald Gerda Gilbert Gilda Gina Glenda Gordon Grace Greta Guido Gustav Gwen
    Hanna Harold Harriet Harvey Hazel Heidi Helga Henry Herman Hilda Holly Homer Horace Howard Hubert Hugo Ida
    Igor Ilse Ingrid Irene Iris Irma Isaac Ivan Ivy Jacob Jane Janet Jasmin Jasper Jerome Jessica Joan Joel
    Jonas Joseph Judith Julia Julius Justin Karen Karl Katrin Keith Kenneth Kira Klaus Konrad Lara Laura Lea
    Leila Lena Leo Leon Leonard Leslie Lewis Lilian Linda Linus Lisa Lola Lorenz Louis Lucas Lucy Ludwig Luna
    Lydia Mabel Magda Malcolm Manuel Marcel Marcus Margot Maria Marta Martin Matilda Maurice Max Melissa
    Mercedes Milo Mina Minna Mira Miriam Monica Morris Moses Nadia Nancy Naomi Nelson Nestor Nicole Nina Noah
    Nora Norbert Olaf Olga Oliver Olivia Oscar Oswald Otto Pamela Patrick Paul Paula Pedro Penelope Percy
    Peter Petra Philip Phoebe Pia Quentin Rachel Ralph Ramona Rebecca Regina Rita Robert Roland Ronald Rosa
    Rudolf Rufus Ruth Sabina Samuel Sandra Sarah Selma Sidney Silvia Simon Sofia Stella Sybil Tanya Teresa
    Theo Thomas Tilda Tobias Trudy Ulrich Ursula Valerie Vera Victor Vincent Viola Virgil Walter Wanda Wilma
    Xenia Yara Yvonne Zelda
    """
)

ADJECTIVES = _words(
    """
    beige big black blue bold brave brief bright bronze brown busy calm cheap clean clever cold copper crimson
    curly dark dear deep dirty dull dusty faded famous fancy fast fine firm flat foreign fragile fresh funny
    gentle giant golden grand gray green happy heavy hidden huge humble jolly kind large lazy light little
    lively local lone long loud lucky mellow merry mighty modern narrow neat new nimble noble pale patient
    pink plain polished precious pretty proud purple quick quiet rare red rich robust rough round royal rusty
    sad scarlet secret shiny short shy silent silver simple sleepy slim small smooth soft solid spotted steep
    sticky striped strong sturdy sweet swift tall teal thick thin tidy tiny tough tricky vast violet vivid
    warm weary white wide wild wise worn yellow young
    """
)

PETS = _words(
    """
    badger beaver canary cat cheetah chicken cobra crane cricket dog dolphin donkey dove duck falcon ferret
    finch fox frog gecko goat goose hamster hare hawk hedgehog heron horse jackal kitten lamb lizard llama
    magpie mouse mule newt panda parrot peacock pelican penguin pigeon pony puppy rabbit raven robin salmon
    seal snail sparrow spider swan tiger toad turtle walrus weasel wolf wombat zebra
    """
)
INSTRUMENTS = _words(
    """
    balalaika banjo bassoon bell bugle cello clarinet cornet cymbal drum fiddle flute gong guitar harp
    harmonica horn kazoo keyboard lute lyre mandolin marimba piano piccolo recorder saxophone sitar tambourine
    triangle trombone trumpet tuba viola violin whistle xylophone zither
    """
)
GARMENTS = _words(
    """
    beret blazer blouse bonnet bowtie cap cape cardigan cloak coat collar dress fedora frock glove gown hat
    helmet hood jacket jersey kilt kimono mantle mask mitten necktie parka poncho pullover robe sandal sari
    sash scarf shawl shirt shoe skirt slipper sock suit sweater toga tunic turban vest veil
    """
)
VEHICLES = _words(
    """
    bicycle boat bus cab camper canoe caravan carriage cart catamaran chariot coach convertible dinghy ferry
    gig glider gondola hatchback helicopter kayak limousine lorry moped motorbike pickup raft roadster
    rickshaw sailboat scooter sedan ship sled sleigh spaceship steamer tandem taxi tractor trailer train tram
    tricycle truck van wagon yacht
    """
)
HOMES = _words(
    """
    barn barrack basement bungalow cabin castle cave chalet chapel chateau convent cottage dormitory farmhouse
    fortress garret grange hostel hotel house houseboat hut lighthouse lodge loft longhouse manor mansion
    monastery palace parsonage penthouse rectory residence room shack shed shelter suite tavern tent tepee
    tower townhouse treehouse villa warehouse wigwam windmill yurt
    """
)
TOOLS = _words(
    """
    bottle bucket candle chain chisel clock coin comb compass drill fan file hammer hoe jar jug kettle key
    knife ladder lamp lantern lens lever map mirror mug nail needle pan pencil pin pipe plough pot pump purse
    rake razor rope ruler saw scythe shovel sickle sieve spade spanner spoon stapler sword telescope thimble
    torch trowel vase vise wallet wheel whip whisk wrench
    """
)

PLACES = _words(
    """
    bakery bridge church factory field forest garden harbour hill lake library market meadow mill museum park
    river road school square station street theatre town valley village
    """
)
THINGS = _words(
    """
    baker bells boys carpenter children clouds doctor farmers fishermen girls guests leaves letters lights
    mayor miller neighbours rain shepherd snow soldiers storm sun teacher tourists travellers wind workers
    """
)
DEEDS = _words(
    """
    appeared arrived changed danced disappeared gathered laughed moved paused played rested returned sang
    slept spoke stayed stopped talked waited wandered worked
    """
)
TIMES = _words(
    """
    afternoon autumn evening month morning night spring summer week winter year
    """
)

NOUNS = (*PETS, *INSTRUMENTS, *GARMENTS, *VEHICLES, *HOMES, *TOOLS)
JOBS = _words(
    """
    barber blacksmith bookbinder brewer broker butcher cellist chemist clerk cobbler composer cook cooper
    courier dancer dentist diver fisher florist forester glazier grocer hatter joiner judge jurist lawyer
    librarian locksmith mason mechanic merchant midwife painter pilot plumber poet porter potter printer
    ranger roofer sailor sculptor secretary smith surgeon surveyor tailor tanner tiler translator vintner
    waiter warden watchmaker weaver welder writer
    """
)
TOWNS = tuple(
    start + end
    for start in _words(
        "Ash Brook Clay Dun Elm Fair Glen Hart Kings Lang Mill North Oak Red Stan Thorn West Win Wood Lind"
    )
    for end in _words("bury field ford ham ton wick")
)
