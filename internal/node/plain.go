package node

import (
	"strconv"
	"strings"

	"google.golang.org/grpc/status"
)

// plainError is an error of a call without gRPC's own words around it.
type plainError struct{ error }

func plainly(err error) error {
	if _, ok := status.FromError(err); !ok {
		return err
	}
	return plainError{err}
}

func (e plainError) Unwrap() error { return e.error }

func (e plainError) Error() string {
	text := status.Convert(e.error).Message()
	rest, found := strings.CutPrefix(text, "connection error: desc = ")
	if !found {
		return text
	}
	if inner, err := strconv.Unquote(rest); err == nil {
		rest = inner
	}
	return strings.TrimPrefix(rest, "transport: Error while dialing: ")
}
