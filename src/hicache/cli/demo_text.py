"""The demo's document never changes: it was written for hicache, and everything in it is made up."""

from typing import Final

DOCUMENT: Final = """\
Handbook for guests of Tarn Holm

1. The island

Tarn Holm is a small island in a cold bay. It is four kilometres long and a little more than one kilometre wide. \
Sixty-one people live here all year. In summer there are about three hundred, most of them walkers, bird watchers \
and painters. The highest point is Kettle Hill, at 118 metres. From its top the whole island can be seen, and on a \
clear morning also the church tower of Brannock on the mainland, nineteen kilometres to the east. There is one \
village, Holmside, on the sheltered eastern shore. The western shore has cliffs, and no path goes down to the water \
there.

The island has no cars. Loads are carried by two electric carts, which belong to the village, and by a pony called \
Biscuit, who belongs to nobody in particular and works when she likes. Bicycles can be rented at the harbour for \
seven crowns a day. Please leave them in the rack by the pump house in the evening, because the wind takes whatever \
is not tied down.

2. The ferry

The ferry is called Marigold. She was built in 1987 and carries forty-five passengers. From April to September she \
leaves Brannock at 8:15 and at 16:40, and she leaves Tarn Holm at 9:50 and at 18:10. The crossing takes seventy \
minutes in good weather. From October to March there is one crossing a day, at 10:30 from Brannock, and the boat \
goes back as soon as she is unloaded. On the first Monday of each month the Marigold stays in port for repairs and \
nothing sails at all.

A single ticket costs fourteen crowns. Children under ten travel free, and so do musicians who play during the \
crossing. Tickets are sold on board by the mate, Ansel Roe. The captain is Ingrid Sollis. She has commanded the \
ferry for twenty-two years, and she alone decides whether the weather is good enough. When the wind blows from the \
north-west with more than sixteen metres per second, the ferry does not sail. A red flag then hangs from the harbour \
office, and a blue flag says that the next crossing will be made.

3. The harbour

The harbour master is Tobias Wren. His office is the yellow house at the end of the stone pier, and it is open from \
7:00 to 19:00. The harbour office listens on radio channel 12 day and night. There are eighteen berths for visiting \
boats, with a depth of three metres at low water. A berth costs thirty crowns a night, with water and electricity. \
Fuel is sold on Tuesdays and Fridays only, between ten and noon. Fish may be bought straight from the boats at six in \
the morning; the crab is better than the cod. Swimming inside the harbour is not allowed, because of the propellers. \
The beach at Linnet Bay, ten minutes to the south, is safe, sandy and hardly ever warm.

4. The lighthouse

The lighthouse stands on the northern tip, called Cold Nose. It was finished in 1869, after eleven years of work, by \
the engineer Matilda Crane. She built it from grey granite that was brought over in winter, when the farmers had \
time to row. The tower is thirty-four metres high and has 187 steps. The lamp burned whale oil at first, then \
paraffin, and has been electric since 1931. It flashes twice every fifteen seconds, and the light can be seen from \
forty kilometres away.

The last keeper, Orrin Vale, left in 1994, when the lamp became automatic. His notebooks, ninety-three of them, are \
kept in the small museum at the foot of the tower. He wrote down the weather every three hours for thirty-one years, \
and on nearly every page also what he had cooked. The museum opens from 11:00 to 15:00, except on Wednesdays. \
Entrance is five crowns, and the climb to the gallery is included. Only six people may be up there at the same time, \
so there can be a queue on Sundays. Dogs stay below.

5. Where to sleep and eat

The guest house is called The Lantern. It has twelve rooms and is run by Petra Lindqvist and her two sons. A room \
with breakfast costs ninety crowns. Rooms 3, 7 and 11 look out over the sea; room 9 is next to the kitchen and smells \
of bread from five o'clock on. Arrive before 20:00 or write ahead, because the front door is locked when the family \
goes to bed. Behind the school there is a field with space for twenty tents, at eight crowns for each tent. Open fires \
are forbidden everywhere on the island, since the heath burned in the dry summer of 2003.

Bread is baked by Jonas Feld. His bakery opens at 6:30 and closes when everything is sold, which in July can be as \
early as nine. Ask for the dark loaf with caraway, which he bakes on Thursdays. The shop next door sells food, \
batteries, postcards and rope. It is open from nine to one and again from three to six, and it takes cash only, as the \
connection to the bank fails in fog. The pub, The Drowned Bell, serves soup and pies from noon to nine in the evening. \
On Saturdays there is music, and nobody is asked whether they can play.

6. Birds and walks

The island is known for its puffins. About two thousand four hundred pairs nest in the northern cliffs from the middle \
of April to the end of July. Stay on the marked path there: the ground is full of burrows, and a foot that breaks \
through one kills the chick inside. The warden is Salome Birk. She leads a walk on every Tuesday and Saturday at \
14:00, starting from the pump house; it takes two hours and costs nothing, but she likes to be given biscuits. In \
October tired migrants rest here, and in the year 2011 she counted one hundred and seventy-four kinds in a single \
week.

Three paths are marked. The green path goes around the village and takes forty minutes. The white path goes to the \
lighthouse and back, nine kilometres in all, and takes three hours. The orange path crosses Kettle Hill and is steep; \
it takes two hours and should not be walked in fog. There is a spring half way up, with good water, and a tin cup on a \
chain. Please hang the cup back so that the pony cannot step on it.

7. When something goes wrong

The nurse, Hanne Aldous, lives in the white house behind the church and can be called at any hour by ringing the bell \
at her gate. Her telephone number is 4471. For serious cases a helicopter comes from Brannock and lands on the school \
field; it takes about twenty-five minutes. The village hall has an emergency generator, dry blankets and a stove. When \
the church bell rings without stopping, everybody should go there at once. This last happened in the storm of November \
2016, when the sea came over the pier and the whole village spent two nights in the hall, with forty-one guests, nine \
dogs and the pony.

Lost things are brought to the harbour office. Mr Wren keeps them for a year in a big green chest, and after that they \
are sold at the midsummer fair for the benefit of the school, which has seven pupils and one teacher, Miss Odile Marsh.

8. The winter fair

On the second Saturday of December the village holds its winter fair in the hall. It was begun in 1951 by the weaver \
Agnes Thorne, who wanted to sell her blankets before the boats stopped for the season. Today there are nineteen \
stalls, with wool, honey, smoked fish, wooden spoons and far too many candles. The honey comes from the hives behind \
the lighthouse and won a medal in Brannock in 2019. At four o'clock the children sing, at five the best sweater is \
chosen, and at six there is a race in rowing boats around the red buoy, which the bakery has won seven times. Guests \
are welcome, and the ferry sails once more at 21:30 that evening, the only night crossing of the year. Bring a \
lantern, because the street lamps are switched off on purpose.

9. A few last requests

Water is scarce in August, so please take short showers. Take your rubbish back to the mainland, or pay two crowns for \
a bag at the shop. Close every gate behind you. Do not feed the pony more than one apple. And write something into the \
guest book in the pump house before you leave: the oldest one goes back to 1902, and people here read them aloud in \
winter, when the evenings are long and no ferry comes.
"""

QUESTIONS: Final = (
    "Which radio channel does the harbour office listen on?",
    "Which birds is the island known for?",
    "What is the telephone number of the nurse?",
)
"""The first one makes the rows of the table; the others show that what they share is not computed again."""


INSTRUCTION: Final = "You answer questions about a handbook. Answer in one short sentence."


def conversation(question: str) -> list[dict[str, str]]:
    """The chat that asks `question` about the document. The document comes first: it is what the questions share."""
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": f"{DOCUMENT}\nQuestion: {question}"},
    ]
