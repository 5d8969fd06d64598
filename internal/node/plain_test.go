package node

import (
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestPlainly(t *testing.T) {
	for want, err := range map[string]error{
		"dial tcp 127.0.0.1:1: connect: connection refused": status.Error(codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:1: connect: connection refused"`),
		"error reading server preface: EOF":                 status.Error(codes.Unavailable, "connection error: desc = error reading server preface: EOF"),
		"context deadline exceeded":                         status.Error(codes.DeadlineExceeded, "context deadline exceeded"),
	} {
		if got := plainly(err); got.Error() != want || status.Code(fmt.Errorf("hello: %w", got)) != status.Code(err) {
			t.Errorf("%q of code %v, want %q of %v", got, status.Code(got), want, status.Code(err))
		}
	}
	if err := errors.New("of nobody's call"); plainly(err) != err { //nolint:errorlint // the very same
		t.Errorf("%v is another one", plainly(err))
	}
}
