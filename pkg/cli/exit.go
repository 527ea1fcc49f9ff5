package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/compose"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Exit codes. They are part of the command's contract: scripts rely on them.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitCredential  = 3
	exitForbidden   = 4
	exitNotFound    = 5
	exitConflict    = 6
	exitInvalid     = 7
	exitUnavailable = 8
	exitTimeout     = 9
	exitInstance    = 10
	exitInterrupted = 130
)

func exitCodesTopic() *cobra.Command {
	return &cobra.Command{
		Use:   "exit-codes",
		Short: "What the exit codes mean",
		Long: `Exit codes:

      0  done
      1  failed for another reason
      2  wrong use: unknown command or flag, missing argument, no hub configured
      3  no or bad credential (401)
      4  not allowed (403)
      5  not there, or another org's (404)
      6  the state does not allow it (409, 412)
      7  the input is not acceptable (400, 413, 422)
      8  the hub is not reachable or too busy (network, 429, 5xx)
      9  gave up waiting (--timeout)
     10  the app instance failed or ended elsewhere than waited for
    130  interrupted

"gpuaas exec" ends with the exit code of the command that it ran.`,
	}
}

// usageError is the caller's mistake at the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usage(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	if c, ok := errors.AsType[commandExit](err); ok {
		return int(c)
	}
	if _, ok := errors.AsType[usageError](err); ok {
		return exitUsage
	}
	if _, ok := errors.AsType[*client.InstanceError](err); ok {
		return exitInstance
	}
	if _, ok := errors.AsType[compose.Refused](err); ok {
		return exitInvalid
	}
	if p, ok := errors.AsType[*client.Problem](err); ok {
		return problemCode(int(p.Status))
	}
	if f, ok := errors.AsType[*fault.Error](err); ok {
		return faultCode(f.Kind)
	}
	if _, ok := errors.AsType[*client.CredentialError](err); ok {
		return exitCredential
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return exitTimeout
	}
	if errors.Is(err, context.Canceled) {
		return exitInterrupted
	}
	if _, ok := errors.AsType[*client.UnreachableError](err); ok {
		return exitUnavailable
	}
	return exitFailed
}

func problemCode(status int) int {
	switch {
	case status == http.StatusUnauthorized:
		return exitCredential
	case status == http.StatusForbidden:
		return exitForbidden
	case status == http.StatusNotFound:
		return exitNotFound
	case status == http.StatusConflict, status == http.StatusPreconditionFailed:
		return exitConflict
	case status == http.StatusTooManyRequests, status >= http.StatusInternalServerError:
		return exitUnavailable
	default:
		return exitInvalid
	}
}

// faultCode is for what this machine's own checks refuse: a manifest, a key, an image.
func faultCode(k fault.Kind) int {
	switch k {
	case fault.Malformed, fault.Unprocessable, fault.TooLarge:
		return exitInvalid
	case fault.Conflict, fault.PreconditionFailed:
		return exitConflict
	case fault.NotFound:
		return exitNotFound
	case fault.Unauthenticated:
		return exitCredential
	case fault.Forbidden:
		return exitForbidden
	case fault.Unavailable, fault.RateLimited:
		return exitUnavailable
	default:
		return exitFailed
	}
}

// describe is what a person reads about an error.
func describe(err error) string {
	f, ok := errors.AsType[*fault.Error](err)
	if !ok {
		return err.Error()
	}
	var text strings.Builder
	fmt.Fprintf(&text, "%s (%s)", f.Public, f.Code)
	for _, field := range f.Fields {
		fmt.Fprintf(&text, "; %s %s", field.Pointer, field.Reason)
		if field.Hint != "" {
			fmt.Fprintf(&text, " (%s)", field.Hint)
		}
	}
	if f.Cause != nil {
		fmt.Fprintf(&text, ": %v", f.Cause)
	}
	return text.String()
}
