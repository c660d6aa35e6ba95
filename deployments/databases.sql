CREATE DATABASE prefect;  -- beside that of the LightningStore, which POSTGRES_USER names
