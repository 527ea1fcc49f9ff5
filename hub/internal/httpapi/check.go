package httpapi

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/gin-gonic/gin"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// maxProblemFields bounds the errors of one problem; more are cut, the caller sees them after mending these.
const maxProblemFields = 32

// check validates a request against its operation and returns its body, which stays readable.
func check(c *gin.Context, o *operation) ([]byte, error) {
	fields := checkParameters(c, o)
	body, err := readBody(c, o)
	if err != nil {
		return nil, err
	}
	bodyFields, err := checkBody(c.Request, o, body)
	if err != nil {
		return nil, err
	}
	return body, invalid(append(fields, bodyFields...))
}

// invalid returns one fault for all invalid fields; nil for none.
func invalid(fields []fault.Field) error {
	if len(fields) == 0 {
		return nil
	}
	if len(fields) > maxProblemFields {
		fields = fields[:maxProblemFields]
	}
	f := fault.New(fault.Malformed, codeInvalidRequest, "The request is not what the contract asks for; see errors for "+
		"the places.", nil).Permanent()
	f.Fields = fields
	return f
}

func readBody(c *gin.Context, o *operation) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, o.maxBodyBytes))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, fault.New(fault.TooLarge, codeBodyTooLarge, fmt.Sprintf("The body is larger than the %d bytes that "+
			"this operation takes.", o.maxBodyBytes), nil).
			WithField("", fmt.Sprintf("is larger than %d bytes", o.maxBodyBytes)).Permanent()
	case err != nil:
		return nil, fault.New(fault.Malformed, codeBodyIncomplete, "The body did not arrive completely; send the request "+
			"again.", err)
	}
	c.Request.Body = readAlready{bytes.NewReader(body)}
	c.Request.ContentLength = int64(len(body))
	return body, nil
}

// readAlready is a body that is not on the connection any more.
type readAlready struct{ io.Reader }

// Close implements io.Closer.
func (readAlready) Close() error { return nil }

func checkBody(r *http.Request, o *operation, body []byte) ([]fault.Field, error) {
	text := bytes.TrimSpace(body)
	if o.body == nil {
		if len(text) == 0 || bytes.Equal(text, []byte("{}")) {
			return nil, nil
		}
		return []fault.Field{{Reason: "this operation takes no body"}}, nil
	}
	if len(text) == 0 && o.bodyOptional {
		return nil, nil
	}
	if len(text) == 0 {
		return nil, fault.New(fault.Malformed, codeBodyMissing, "This operation needs a JSON body.", nil).WithField("",
			"is missing").Permanent()
	}
	media := mediaOf(r.Header)
	if media != mediaJSON && (media != mediaForm || o.form == nil) {
		return nil, fault.New(fault.Malformed, codeContentTypeUnsupported, "Send the body as JSON.", nil).
			WithHint("header/Content-Type", "is not application/json in UTF-8", "Content-Type: application/json").Permanent()
	}
	// The generated code compares the header's text, whose case does not count.
	r.Header.Set("Content-Type", media)
	if media == mediaForm {
		return formFields(o, body), nil
	}
	if f := strictJSON(body); f != nil {
		return nil, fault.New(fault.Malformed, codeBodyNotJSON, "The body is not the strict JSON that this API takes.", nil).
			WithHint(f.Pointer, f.Reason, f.Hint).Permanent()
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		return nil, fault.New(fault.Malformed, codeBodyNotJSON, "The body is not JSON.", err).WithField("",
			"is not JSON").Permanent()
	}
	if fields := schemaFields("", o.body.Validate(value)); len(fields) > 0 {
		return fields, nil
	}
	return rounded("", value), nil
}

// mediaOf is the media type of a body; empty where it is not in UTF-8, or not said.
func mediaOf(h http.Header) string {
	media, params, err := mime.ParseMediaType(h.Get("Content-Type"))
	if charset, ok := params["charset"]; err != nil || ok && !strings.EqualFold(charset, "utf-8") {
		return ""
	}
	return media
}

func checkParameters(c *gin.Context, o *operation) []fault.Field {
	query, err := url.ParseQuery(c.Request.URL.RawQuery)
	if err != nil {
		return []fault.Field{{Pointer: "query", Reason: "is not a well-formed query string"}}
	}
	var fields []fault.Field
	for _, p := range o.params {
		var values []string
		switch p.in {
		case "path":
			values = []string{c.Param(p.name)}
		case "query":
			values = query[p.name]
			delete(query, p.name)
		case "header":
			values = c.Request.Header.Values(p.name)
		}
		fields = append(fields, p.check(values)...)
	}
	for _, name := range slices.Sorted(maps.Keys(query)) {
		fields = append(fields, fault.Field{
			Pointer: "query/" + escapePointer(strings.ToValidUTF8(name, "")),
			Reason:  "is not a parameter of this operation",
		})
	}
	return fields
}

func (p parameter) check(values []string) []fault.Field {
	at := p.in + "/" + p.name
	switch {
	case len(values) == 0 && p.required:
		return []fault.Field{{Pointer: at, Reason: "is missing"}}
	case len(values) == 0:
		return nil
	case len(values) > 1 && p.kind != "array":
		return []fault.Field{{Pointer: at, Reason: "is given more than once"}}
	}
	var value any = values[0]
	switch p.kind {
	case "array":
		items := make([]any, len(values))
		for n, v := range values {
			items[n] = v
		}
		value = items
	case "integer":
		if _, err := strconv.ParseInt(values[0], 10, 64); err != nil {
			return []fault.Field{{Pointer: at, Reason: "is not a whole number"}}
		}
		value = json.Number(values[0])
	case "boolean":
		if values[0] != "true" && values[0] != "false" {
			return []fault.Field{{Pointer: at, Reason: "is neither true nor false"}}
		}
		value = values[0] == "true"
	}
	return schemaFields(at, p.schema.Validate(value))
}

// schemaFields turns a validation error into fields with reasons of this API: the texts of the library would quote
// values.
func schemaFields(base string, err error) []fault.Field {
	var bad *jsonschema.ValidationError
	if !errors.As(err, &bad) {
		return nil
	}
	var fields []fault.Field
	collect(base, bad, &fields)
	slices.SortStableFunc(fields, func(a, b fault.Field) int { return strings.Compare(a.Pointer, b.Pointer) })
	return slices.Compact(fields)
}

// maxCollected bounds the fields that are sorted; an answer names fewer.
const maxCollected = 1000

func collect(base string, e *jsonschema.ValidationError, out *[]fault.Field) {
	if len(*out) >= maxCollected {
		return
	}
	if len(e.Causes) > 0 {
		for _, cause := range e.Causes {
			collect(base, cause, out)
		}
		return
	}
	var pointer strings.Builder
	pointer.WriteString(base)
	for _, token := range e.InstanceLocation {
		pointer.WriteString("/" + escapePointer(token))
	}
	at := pointer.String()
	switch k := e.ErrorKind.(type) {
	case *kind.Required:
		for _, name := range k.Missing {
			*out = append(*out, fault.Field{Pointer: at + "/" + escapePointer(name), Reason: "is missing"})
		}
	case *kind.AdditionalProperties:
		for _, name := range k.Properties {
			*out = append(*out, fault.Field{Pointer: at + "/" + escapePointer(name), Reason: "is not a known key"})
		}
	default:
		reason, hint := explain(e.ErrorKind)
		*out = append(*out, fault.Field{Pointer: at, Reason: reason, Hint: hint})
	}
}

func explain(k jsonschema.ErrorKind) (reason, hint string) {
	switch k := k.(type) {
	case *kind.Type:
		return "is not of type " + strings.Join(k.Want, " or "), ""
	case *kind.Enum:
		return "is not one of the allowed values", "one of " + joinValues(k.Want)
	case *kind.Pattern:
		return "does not have the required form", "must match " + k.Want
	case *kind.MinLength:
		return fmt.Sprintf("is shorter than %d characters", k.Want), ""
	case *kind.MaxLength:
		return fmt.Sprintf("is longer than %d characters", k.Want), ""
	case *kind.Minimum:
		return "is less than " + k.Want.RatString(), ""
	case *kind.Maximum:
		return "is more than " + k.Want.RatString(), ""
	case *kind.MinItems:
		return fmt.Sprintf("has fewer than %d items", k.Want), ""
	case *kind.MaxItems:
		return fmt.Sprintf("has more than %d items", k.Want), ""
	case *kind.MaxProperties:
		return fmt.Sprintf("has more than %d keys", k.Want), ""
	case *kind.Format:
		if k.Want == "date-time" {
			return "is not an RFC 3339 time", "like 2026-01-31T12:00:00Z"
		}
		return "is not a valid " + k.Want, ""
	default:
		return "is not what the contract asks for", ""
	}
}

func joinValues(values []any) string {
	words := make([]string, len(values))
	for i, v := range values {
		words[i] = fmt.Sprint(v)
	}
	return strings.Join(words, ", ")
}

// requestMAC is equal for requests that idempotency takes for the same. Whitespace in the body does not count. It is
// keyed: a body may hold a secret, which a reader of the database could find by trying values against a plain digest.
func requestMAC(key []byte, r *http.Request, body []byte) []byte {
	h := hmac.New(sha256.New, key)
	fmt.Fprintf(h, "%s\n%s\n", r.URL.Path, r.URL.RawQuery)
	var compact bytes.Buffer
	if json.Compact(&compact, body) == nil {
		body = compact.Bytes()
	}
	h.Write(body)
	return h.Sum(nil)
}
