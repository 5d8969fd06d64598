// Package pairtest holds one test: two managers, an owner's and a reader's, with
// real arenas, seal table, log, and board, joined by the in-memory transport
// with faults, under random operations. After every operation pages are
// conserved; whatever is ready has the bytes that were published.
package pairtest
