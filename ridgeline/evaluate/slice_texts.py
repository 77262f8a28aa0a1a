"""The texts of the slices prose, mathematics and multilingual. Written for Ridgeline; they may be used freely with it."""

from __future__ import annotations

PROSE = """\
The ferry left the quay a quarter of an hour late, as it did on most mornings, and nobody on board seemed to mind. A man \
with a ladder had sat down on the rope locker and was eating an apple. Two girls in school coats leaned over the rail to \
watch the water being pulled under the hull, and argued about how deep it was. The older one said that a church lay down \
there, with its tower still standing, and that in dry years one could touch the cross with an oar. The younger one said \
that nothing in her sister's stories could ever be touched with anything.

Behind them the town grew smaller without becoming any quieter. The bells had been mended in spring, after eleven years of \
silence, and the sexton rang them whenever he could find a reason. He rang for weddings and for burials, for the first \
herring and for the last snow; once he had rung because the baker's cat had come home. People complained, and then, in the \
weeks when he lay ill, complained that they could no longer tell the time of day.

Marta stood at the bow with her suitcase between her feet. She had packed it four times. The first time she had put in what \
she would need, and had been unable to close it. The second time she had put in what she loved, and had been ashamed of how \
little that was. The third time her mother had packed it for her, kindly and quite wrongly, with three tablecloths and a \
lamp. What it held now was a compromise: clothes for a fortnight, the book on tides that her grandfather had annotated in \
pencil, one tablecloth, and a jar of plum jam that would certainly break.

She had expected to feel something at the moment when the harbour wall slid past, and had even thought about what it would \
be, so that she would recognise it. There was only the wind, and a smell of diesel and wet wood, and the ladder man asking \
whether she knew how long the crossing took. An hour and a half, she said, if the current is kind. He nodded as if this were \
news about a mutual acquaintance. He was going over to repair a roof, he said; the storm in October had taken half of it, \
and the owner had waited all winter under the other half. When she asked what he would do if it rained, he looked at the sky \
for a while, and said that roofs were mended in the rain more often than in the sun, because in the sun nobody remembers \
that they leak.

Past the lighthouse the water changed its colour. It did so along a line, as if somebody had drawn it: green on this side, \
slate on the other. Her grandfather's book had a page about it. The river carries its mud out for two miles and then, quite \
suddenly, gives up. In the margin he had written, in letters so small that she had needed his reading glasses for them: not \
gives up, lets go. She had thought about that remark for most of a winter, at first because she took it to be about the \
river, and later because she did not.

The engine dropped to a murmur. On the far shore the other town had begun to put out its details one by one: a crane, a row \
of poplars, a yellow house, washing on a line, a child with a stick. It looked exactly like the place she had left, seen in \
a mirror, and for the first time that morning she laughed. The ladder man offered her the second half of his apple. She took \
it. Then the rope flew across the gap, somebody caught it, and the two halves of the day were tied together.
"""

MATHEMATICS = """\
Theorem. The square root of 2 is not a quotient of two whole numbers. Proof. Suppose that p/q = √2 with p and q having no \
common divisor. Then p² = 2q², so p² is even, and so is p, because the square of an odd number is odd. Write p = 2r. Then \
4r² = 2q², that is q² = 2r², so q is even as well. Now 2 divides both p and q, against the assumption. ∎

Theorem. For every natural number n the sum 1 + 2 + … + n equals n(n + 1)/2. Proof by induction. For n = 1 both sides are 1. \
If the claim holds for n, then 1 + 2 + … + n + (n + 1) = n(n + 1)/2 + (n + 1) = (n + 1)(n/2 + 1) = (n + 1)(n + 2)/2, which is \
the claim for n + 1. ∎

Theorem. There are infinitely many primes. Proof. Let p₁, …, pₖ be any finite list of primes and N = p₁p₂⋯pₖ + 1. Division of \
N by any pᵢ leaves the remainder 1, so no pᵢ divides N. But N > 1 has some prime divisor, which is then not in the list. ∎

Example. Find the extrema of f(x) = x³ − 3x + 1. The derivative is f′(x) = 3x² − 3 = 3(x − 1)(x + 1), which vanishes at x = −1 \
and x = 1. The second derivative f″(x) = 6x is −6 at x = −1 and 6 at x = 1. So f has a local maximum f(−1) = −1 + 3 + 1 = 3 and \
a local minimum f(1) = 1 − 3 + 1 = −1.

Example. Compute the integral of x·eˣ from 0 to 1. Integration by parts with u = x and v′ = eˣ gives [x·eˣ] − ∫ eˣ dx = \
e − (e − 1) = 1.

Example. Solve the system 2x + y = 11, x − y = 1. Adding the equations gives 3x = 12, so x = 4; from the second, y = x − 1 = 3. \
Check: 2·4 + 3 = 11.

Example. A fair die is thrown twice. The probability that the sum is 7 is the number of pairs (1,6), (2,5), (3,4), (4,3), \
(5,2), (6,1), which is 6, divided by 36, that is 1/6. Given that the first throw is even, the pairs (2,5), (4,3), (6,1) remain \
among 18, again 1/6: the two events are independent.

Example. The matrix A with rows (2, 1) and (1, 2) has the characteristic polynomial (2 − λ)² − 1 = λ² − 4λ + 3 = (λ − 1)(λ − 3). \
Its eigenvalues are 1 and 3; eigenvectors are (1, −1) and (1, 1), which are orthogonal, as they must be for a symmetric matrix.

Definition. A sequence aₙ converges to a if for every ε > 0 there is an N such that |aₙ − a| < ε for all n ≥ N. Claim: 1/n \
converges to 0. Given ε > 0 choose N > 1/ε. Then for n ≥ N we have |1/n − 0| = 1/n ≤ 1/N < ε. ∎
"""

# One text about one subject, the water in a garden, in each language.
LANGUAGES = {
    "German": """\
Wer einen Garten bewässert, sollte es am frühen Morgen tun. Dann ist der Boden kühl, und das Wasser erreicht die Wurzeln, \
bevor die Sonne es verdunsten lässt. Einmal gründlich zu gießen ist besser, als jeden Tag ein wenig zu sprengen, denn die \
Pflanzen bilden dann tiefe Wurzeln und überstehen auch trockene Wochen. Regenwasser aus einer Tonne ist weich und kostet \
nichts; man muss sie nur abdecken, damit keine Mücken darin brüten.""",
    "French": """\
Il vaut mieux arroser le jardin tôt le matin, quand la terre est encore fraîche et que l'eau atteint les racines avant de \
s'évaporer. Un arrosage abondant une fois par semaine est préférable à quelques gouttes chaque jour, car les plantes vont \
alors chercher l'humidité en profondeur. L'eau de pluie recueillie dans un tonneau est douce et gratuite; il suffit de le \
couvrir pour que les moustiques n'y pondent pas leurs œufs.""",
    "Spanish": """\
Conviene regar el jardín por la mañana temprano, cuando la tierra está fresca y el agua llega a las raíces antes de que el \
sol la evapore. Es mejor regar mucho una vez por semana que un poco todos los días, porque así las plantas echan raíces \
profundas y soportan la sequía. El agua de lluvia que se guarda en un barril es blanda y no cuesta nada; solo hay que \
taparlo para que no críen los mosquitos.""",
    "Italian": """\
È meglio annaffiare il giardino la mattina presto, quando la terra è fresca e l'acqua raggiunge le radici prima che il sole \
la faccia evaporare. Annaffiare bene una volta alla settimana è più utile che bagnare poco ogni giorno, perché le piante \
mettono radici profonde e sopportano la siccità. L'acqua piovana raccolta in una botte è dolce e non costa nulla; basta \
coprirla perché le zanzare non vi depongano le uova.""",
    "Portuguese": """\
O melhor é regar o jardim de manhã cedo, quando a terra está fresca e a água chega às raízes antes que o sol a evapore. \
Regar bastante uma vez por semana é melhor do que molhar um pouco todos os dias, porque assim as plantas criam raízes \
profundas e aguentam a seca. A água da chuva guardada num barril é macia e não custa nada; basta tapá-lo para que os \
mosquitos não se reproduzam nele.""",
    "Polish": """\
Ogród najlepiej podlewać wcześnie rano, kiedy ziemia jest chłodna, a woda dociera do korzeni, zanim słońce zdąży ją \
wysuszyć. Lepiej podlać obficie raz w tygodniu niż po trochu każdego dnia, bo wtedy rośliny zapuszczają głębokie korzenie i \
łatwiej znoszą suszę. Deszczówka zebrana w beczce jest miękka i nic nie kosztuje; trzeba ją tylko przykryć, żeby nie lęgły \
się w niej komary.""",
    "Turkish": """\
Bahçeyi sabah erken sulamak en iyisidir; o saatte toprak serindir ve su, güneş onu buharlaştırmadan köklere ulaşır. Her gün \
biraz sulamaktansa haftada bir kez bolca sulamak daha doğrudur, çünkü bitkiler o zaman derin kök salar ve kuraklığa \
dayanır. Bir fıçıda biriken yağmur suyu yumuşaktır ve bedavadır; sivrisinekler üremesin diye üstünü kapatmak yeter.""",
    "Russian": """\
Сад лучше всего поливать рано утром, когда земля ещё прохладная и вода доходит до корней раньше, чем её высушит солнце. \
Полить как следует раз в неделю полезнее, чем брызгать понемногу каждый день: тогда растения пускают глубокие корни и легче \
переносят засуху. Дождевая вода из бочки мягкая и ничего не стоит; нужно только накрывать бочку, чтобы в ней не разводились \
комары.""",
    "Arabic": """\
من الأفضل أن تُسقى الحديقة في الصباح الباكر، حين تكون التربة باردة ويصل الماء إلى الجذور قبل أن تبخره الشمس. والسقي الوافر \
مرة في الأسبوع خير من القليل كل يوم، لأن النباتات تمد عندئذ جذورًا عميقة وتتحمل الجفاف. وماء المطر المجموع في برميل عذب ولا \
يكلف شيئًا، ويكفي أن يُغطى البرميل حتى لا يتكاثر فيه البعوض.""",
    "Hindi": """\
बगीचे को सुबह जल्दी पानी देना सबसे अच्छा है, जब मिट्टी ठंडी होती है और पानी धूप से सूखने से पहले जड़ों तक पहुँच जाता है। हर दिन थोड़ा-थोड़ा \
पानी देने से बेहतर है कि सप्ताह में एक बार अच्छी तरह सींचा जाए, क्योंकि तब पौधों की जड़ें गहरी जाती हैं और वे सूखा सह लेते हैं। पीपे में जमा \
किया हुआ बारिश का पानी मुफ़्त होता है; बस उसे ढककर रखना चाहिए ताकि उसमें मच्छर न पनपें।""",
    "Chinese": """\
给花园浇水最好在清晨，那时土壤还凉，水能在被太阳晒干之前渗到根部。与其每天洒一点，不如每周浇透一次，这样植物会把根扎得更深，\
也更耐旱。用桶接的雨水水质软，又不花钱；只要盖上盖子，蚊子就不会在里面繁殖。""",
    "Japanese": """\
庭の水やりは早朝がいちばんよい。土がまだ冷たく、水は日光で蒸発する前に根まで届くからである。毎日少しずつまくよりも、週に一度\
たっぷり与えるほうが、植物は深く根を張り、乾燥にも強くなる。樽にためた雨水はやわらかく、費用もかからない。蚊がわかないように\
ふたをしておけば十分である。""",
}
