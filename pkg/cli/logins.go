package cli

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// refreshAhead is how long before its end an access token is replaced, so that it never ends under way.
const refreshAhead = time.Minute

// login has the tokens of a session.
type login struct {
	SessionID    string    `yaml:"session_id"`
	AccessToken  string    `yaml:"access_token"`
	ExpiresAt    time.Time `yaml:"expires_at"`
	RefreshToken string    `yaml:"refresh_token"`
	// RefreshKey is the idempotency key of the refresh that was begun.
	RefreshKey string `yaml:"refresh_key,omitempty"`
}

func newLogin(t client.SessionTokens) *login {
	return &login{
		SessionID:   t.SessionID,
		AccessToken: t.AccessToken,
		// By this machine's clock; the hub's may be another.
		ExpiresAt:    time.Now().Add(time.Duration(t.ExpiresIn) * time.Second),
		RefreshToken: t.RefreshToken,
	}
}

// loginCredential gives the access token of a context and replaces it in the store when its end is near.
type loginCredential struct {
	path, context string
	conf          client.Config

	mu sync.Mutex
}

// Bearer returns a token that is good for a while.
func (c *loginCredential) Bearer(ctx context.Context) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, kept, err := c.load(); err != nil || time.Until(kept.ExpiresAt) > refreshAhead {
		return kept.AccessToken, err
	}
	// A refresh token counts once: of two commands at a time, the second finds what the first one got.
	unlock, err := lockStore(c.path)
	if err != nil {
		return "", err
	}
	defer unlock()
	s, kept, err := c.load()
	if err != nil || time.Until(kept.ExpiresAt) > refreshAhead {
		return kept.AccessToken, err
	}
	hub, err := client.Open(c.conf)
	if err != nil {
		return "", err
	}
	defer hub.Close()
	kept, err = c.refresh(ctx, hub, s, kept)
	if err == nil && time.Until(kept.ExpiresAt) <= refreshAhead {
		// These tokens are what an earlier command did not get to keep.
		kept, err = c.refresh(ctx, hub, s, kept)
	}
	return kept.AccessToken, err
}

// refresh exchanges the refresh token. Its key is kept before: used with another one, the token would count as stolen
// where the answer was lost or could not be kept.
func (c *loginCredential) refresh(ctx context.Context, hub *client.Hub, s store, kept login) (login, error) {
	if kept.RefreshKey == "" {
		kept.RefreshKey = rand.Text()
		if err := c.keep(s, kept); err != nil {
			return login{}, err
		}
	}
	t, err := client.Read[client.SessionTokens](hub.RefreshSession(ctx, client.SessionRefresh{
		RefreshToken: kept.RefreshToken,
	}, client.WithIdempotencyKey(kept.RefreshKey)))
	if err != nil {
		if _, refused := errors.AsType[*client.Problem](err); refused {
			return login{}, &client.CredentialError{Cause: err}
		}
		return login{}, err
	}
	fresh := *newLogin(t)
	return fresh, c.keep(s, fresh)
}

func (c *loginCredential) keep(s store, l login) error {
	of := s.Contexts[c.context]
	of.Login = &l
	s.Contexts[c.context] = of
	return s.save(c.path)
}

func (c *loginCredential) load() (store, login, error) {
	s, err := loadStore(c.path)
	if err != nil {
		return s, login{}, err
	}
	kept := s.Contexts[c.context].Login
	if kept == nil {
		return s, login{}, &client.CredentialError{Cause: errors.New("the context has no login any more; log in again")}
	}
	return s, *kept, nil
}

// askSecrets asks for each secret on the terminal; without one they are lines of stdin, and missing ones are empty.
func (a *app) askSecrets(prompts ...string) ([]string, error) {
	out, lines := make([]string, len(prompts)), bufio.NewScanner(a.env.Stdin)
	for i, prompt := range prompts {
		if a.env.ReadSecret != nil {
			var err error
			if out[i], err = a.env.ReadSecret(prompt); err != nil {
				return nil, usage(err)
			}
		} else if lines.Scan() {
			out[i] = lines.Text()
		}
		out[i] = strings.TrimSpace(out[i])
	}
	return out, lines.Err()
}

// passwordLogin starts a session with a password.
func (a *app) passwordLogin(ctx context.Context, c *hubContext, email string) error {
	secrets, err := a.askSecrets("Password: ", "One-time code (empty without one): ")
	if err != nil {
		return err
	}
	return a.startSession(c, func(hub *client.Hub) (*http.Response, error) {
		return hub.Login(ctx, client.Login{Email: email, Password: secrets[0], Code: secrets[1]})
	})
}

// startSession keeps the tokens that ask gets without a credential.
func (a *app) startSession(c *hubContext, ask func(hub *client.Hub) (*http.Response, error)) error {
	hub, err := client.Open(client.Config{URL: c.URL, CAPEM: []byte(c.CAPEM), UserAgent: "gpuaas/" + a.env.Version})
	if err != nil {
		return usage(err)
	}
	defer hub.Close()
	t, err := client.Read[client.SessionTokens](ask(hub))
	if err == nil {
		c.Login = newLogin(t)
	}
	return err
}

// deviceLogin starts a session by the hub's identity provider: the person confirms it in a browser.
func (a *app) deviceLogin(ctx context.Context, c *hubContext) error {
	return a.startSession(c, func(hub *client.Hub) (*http.Response, error) {
		d, err := client.Read[client.DeviceLogin](hub.StartDeviceLogin(ctx))
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(a.env.Stderr, "Open %s and type the code %s\n",
			printable(or(d.VerificationURIComplete, d.VerificationURI)), printable(d.UserCode))
		ticker := time.NewTicker(max(time.Second, time.Duration(d.IntervalSeconds)*time.Second))
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-ticker.C:
			}
			res, err := hub.FinishDeviceLogin(ctx, client.DeviceLoginFinish{Handle: d.Handle})
			if err != nil || res.StatusCode != http.StatusAccepted {
				return res, err
			}
			_ = res.Body.Close()
		}
	})
}

func (a *app) logoutCommand() *cobra.Command {
	c := a.action("logout", "End the session of the current context and forget its tokens", cobra.NoArgs,
		func(ctx context.Context, s *session, _ []string) error {
			if s.context.Login == nil {
				return usage(errors.New("this context is no login with a password; gpuaas context remove NAME forgets it"))
			}
			// A session that has ended before leaves tokens to forget as well.
			if err := closed(s.hub.Logout(ctx, s.editors()...)); err != nil && exitCode(err) != exitCredential {
				return err
			}
			return changeStore(a.storePath(), func(kept *store) error {
				of := kept.Contexts[s.context.name]
				of.Login = nil
				kept.Contexts[s.context.name] = of
				return nil
			})
		})
	return c
}

func (a *app) passwordCommand() *cobra.Command {
	var codes, noCodes, keep bool
	c := a.action("password", "Change your password or one-time codes, and end your other logins", cobra.NoArgs,
		func(ctx context.Context, s *session, _ []string) error {
			if codes && noCodes || keep && !codes && !noCodes {
				return usage(errors.New("--one-time-codes and --no-one-time-codes exclude each other, and --keep needs one"))
			}
			prompts := []string{
				"Current password: ", "One-time code (empty without one): ", "New password, 12 characters or more: ",
			}
			if keep {
				prompts = prompts[:2]
			}
			secrets, err := a.askSecrets(prompts...)
			if err != nil {
				return err
			}
			body := client.PasswordChange{CurrentPassword: secrets[0], Code: secrets[1], RemoveOneTimeCodes: noCodes}
			if !keep {
				body.NewPassword = secrets[2]
			}
			if codes {
				who, err := client.Read[client.Whoami](s.hub.Whoami(ctx, s.editors()...))
				if err != nil {
					return err
				}
				if body.Totp, err = a.setUpCodes(callerName(who), s.context.URL); err != nil {
					return err
				}
			}
			return closed(s.hub.ChangePassword(ctx, body, s.editors()...))
		})
	f := c.Flags()
	f.BoolVar(&codes, "one-time-codes", false, "set up an authenticator app, or another one")
	f.BoolVar(&noCodes, "no-one-time-codes", false, "log in with the password alone from now on")
	f.BoolVar(&keep, "keep", false, "keep the password")
	return c
}

func (a *app) sessionsCommand() *cobra.Command {
	columns := []column[client.Session]{
		{"CURRENT", func(s client.Session) string { return map[bool]string{true: "*"}[s.Current] }},
		{"PROGRAM", func(s client.Session) string { return s.UserAgent }},
		{"ADDRESS", func(s client.Session) string { return s.SourceAddress }},
		{"LOGIN", func(s client.Session) string { return stamp(s.CreatedAt) }},
		{"REFRESHED", func(s client.Session) string { return stamp(s.RefreshedAt) }},
		{"EXPIRES", func(s client.Session) string { return stamp(s.ExpiresAt) }},
		{"ID", func(s client.Session) string { return s.ID }},
	}
	return group("sessions", "Your logins",
		listing(a, "list", "Your logins that count", cobra.NoArgs, columns,
			func(ctx context.Context, s *session, _ []string, cursor string) (*http.Response, error) {
				return s.hub.ListSessions(ctx, &client.ListSessionsParams{Cursor: cursor, Limit: client.PageSize},
					s.editors()...)
			}),
		a.action("revoke SESSION", "End a login; its tokens end at once", cobra.ExactArgs(1),
			func(ctx context.Context, s *session, args []string) error {
				return closed(s.hub.RevokeSession(ctx, args[0], s.editors()...))
			}))
}
