
L1.0.0i1 (28@	J1
n1(0€€€€@Ruser_namespaces_unavailableZÀì€Ø