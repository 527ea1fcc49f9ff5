
n1i1"ְל€״*@
m1h1"
session_secondsp1 ְ„=(2USD:ְל€״@€ץ$Jstop