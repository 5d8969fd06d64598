// Package pairtest tests managers together. TestPair has nodes without processes
// and sockets, each a manager with real arenas, host memory, seal table, log, and
// board. The first computes and publishes, the second pulls from it, decodes, and
// publishes again, the third pulls from both, under random operations and a
// transport with faults. A model says token by token which bytes must be where;
// after every operation pages are conserved, and every byte is what the model
// says. TestRuns counts the copies that bring a source into a worn arena.
package pairtest
