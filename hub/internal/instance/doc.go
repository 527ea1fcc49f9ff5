// Package instance owns app instances, their revisions, members and operations: which status they are in, what a node
// is to run for them, and what nodes say about them. It does not place, price, sign or send anything, and it writes no
// events: its methods return the transitions, and whoever opened the transaction records them.
package instance
