// Package faults holds tests alone: real processes of the real binary on
// loopback, and what goes wrong between them. A process is killed, stopped,
// restarted, drained, muted, kept out, or fed with garbage, and keys and
// certificates are changed, while requests run elsewhere in the cluster.
//
// Each request publishes in three chunks with a pause before the last one, and
// every retrieved byte is compared with a function of the request and of its
// place, computed here. So a test asserts three things at once: whoever the
// fault hits gets a typed error in time, whoever it does not hit notices
// nothing, and nobody ever sees a wrong byte. All nodes' logs are searched for
// panics and data races at the end.
//
// A child process, the guard, kills what the tests leave behind and removes
// their directory, also when they were killed themselves.
package faults
