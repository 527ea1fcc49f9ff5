package telemetry

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"reflect"
	"regexp"
	"strings"
)

// LogConfig says how a daemon logs.
type LogConfig struct {
	// Format is json (the default) or text.
	Format string
	// Level is debug, info (the default), warn or error.
	Level string
}

// NewLogger makes a logger that writes no secret: a field whose name says that it is one is replaced, at any depth, and
// so is a token or a private key inside any text. A line carries the fields of its context (WithFields), and the
// ids of the trace that this is in.
func NewLogger(w io.Writer, conf LogConfig) (*slog.Logger, error) {
	level := slog.LevelInfo
	if conf.Level != "" {
		if err := level.UnmarshalText([]byte(conf.Level)); err != nil {
			return nil, fmt.Errorf("log level %q: want debug, info, warn or error", conf.Level)
		}
	}
	options := &slog.HandlerOptions{Level: level, ReplaceAttr: redactor()}
	switch conf.Format {
	case "", "json":
		return slog.New(contextual{slog.NewJSONHandler(w, options)}), nil
	case "text":
		return slog.New(contextual{slog.NewTextHandler(w, options)}), nil
	}
	return nil, fmt.Errorf("log format %q: want json or text", conf.Format)
}

// contextual adds what the context knows.
type contextual struct{ slog.Handler }

func (h contextual) Handle(ctx context.Context, r slog.Record) error {
	if attrs := contextAttrs(ctx); len(attrs) > 0 {
		r = r.Clone()
		r.AddAttrs(attrs...)
	}
	return h.Handler.Handle(ctx, r)
}

func (h contextual) WithAttrs(attrs []slog.Attr) slog.Handler {
	return contextual{h.Handler.WithAttrs(attrs)}
}

func (h contextual) WithGroup(name string) slog.Handler { return contextual{h.Handler.WithGroup(name)} }

func redactor() func([]string, slog.Attr) slog.Attr {
	clean := cleaner()
	return func(_ []string, a slog.Attr) slog.Attr {
		a.Value = a.Value.Resolve()
		switch {
		case IsSecretKey(a.Key) && a.Value.Kind() != slog.KindGroup:
			a.Value = slog.StringValue(Redacted)
		case a.Value.Kind() == slog.KindString:
			a.Value = slog.StringValue(clean(a.Value.String()))
		case a.Value.Kind() == slog.KindAny:
			a.Value = redactAny(a.Value.Any(), clean)
		}
		return a
	}
}

func redactAny(v any, clean func(string) string) slog.Value {
	switch v := v.(type) {
	case nil:
		return slog.AnyValue(nil)
	case error:
		return slog.StringValue(clean(v.Error()))
	case *slog.Source:
		return slog.AnyValue(v)
	case []byte:
		return slog.StringValue(fmt.Sprintf("%d bytes", len(v))) // bytes in a log are a defect or a secret
	case fmt.Stringer:
		return slog.StringValue(clean(v.String()))
	}
	switch reflect.Indirect(reflect.ValueOf(v)).Kind() { //nolint:exhaustive // everything else is a plain value
	case reflect.Struct, reflect.Map, reflect.Slice, reflect.Array:
		if raw, err := Redact(v); err == nil {
			return slog.StringValue(clean(string(raw)))
		}
	}
	return slog.StringValue(clean(fmt.Sprintf("%+v", v)))
}

// cleaner finds secrets inside texts: our join tokens, those of users, sessions, invitations and wrapped secrets,
// secrets of webhooks, JSON Web Tokens, private keys, passwords in URLs and bearer headers.
func cleaner() func(string) string {
	type rule struct {
		// mark is cheap to search; most texts have none.
		mark    string
		pattern *regexp.Regexp
		with    string
	}
	rules := []rule{
		{"gpuaas-join-", regexp.MustCompile(`gpuaas-join-[A-Za-z0-9_-]+`), Redacted},
		{"gpuaas_", regexp.MustCompile(`gpuaas_(ut|rt|it|wrap)_[A-Za-z0-9_-]+`), Redacted},
		{"whsec_", regexp.MustCompile(`whsec_[A-Za-z0-9+/=_-]+`), Redacted},
		{"eyJ", regexp.MustCompile(`eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`), Redacted},
		{
			"PRIVATE KEY", regexp.MustCompile(`-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|\z)`),
			Redacted,
		},
		{"://", regexp.MustCompile(`(://[^/\s:@]*):[^/\s@]+@`), "$1:" + Redacted + "@"},
		{"earer ", regexp.MustCompile(`([Bb]earer )[^\s"',]+`), "${1}" + Redacted},
	}
	return func(s string) string {
		for _, r := range rules {
			if strings.Contains(s, r.mark) {
				s = r.pattern.ReplaceAllString(s, r.with)
			}
		}
		return s
	}
}
